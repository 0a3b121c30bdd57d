"""Writers of what is served (Hugging Face, PEFT, Triton, NIM, GGUF), their strict validators, and the proof that nothing changed on the way."""
