"""Drafter to ONNX graphs to bundle, and proof that the graphs compute the same."""
