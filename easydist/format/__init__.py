"""Trees and objects as bytes: safetensors files and messages, and a restricted decoder that runs only known code."""
