"""Length extrapolation: small causal models trained at one length and tested at up to 16 times it."""
