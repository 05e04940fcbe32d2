"""Graph to something that runs: ONNX Runtime, TensorRT; one backend outline for all."""
