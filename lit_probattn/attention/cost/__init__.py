"""Costs of variants in closed form, one module per paper."""
