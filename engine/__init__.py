"""Actors of the engine: tokenizer, scheduler, executor."""
