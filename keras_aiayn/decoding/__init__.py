"""Section 6.1: from a trained model to outputs."""
