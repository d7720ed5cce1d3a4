"""Engines that serve the finished draft. They are third parties, each in an environment of its own."""
