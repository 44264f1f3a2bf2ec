"""`python -m lit_probattn.doctor`: what this machine has, and what runs on it would use."""
