"""dtmega: train the Megatron family of transformers; the layout never changes the numbers."""

__version__ = "0.1.0"
