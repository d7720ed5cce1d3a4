"""EAGLE-3 draft models, from conversations to a measured acceptance length."""

__version__ = "0.1.0"
