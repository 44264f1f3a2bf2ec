"""`lit-probattn ask`: what every variant costs at your sizes, before anything is trained."""
