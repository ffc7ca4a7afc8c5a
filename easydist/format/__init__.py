"""Trees and objects as bytes: safetensors files and messages, and decoding that runs nothing it does not know."""
