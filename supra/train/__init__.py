"""Training of converted models: stages of attention transfer, distillation and next-token prediction."""
