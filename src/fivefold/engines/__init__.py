"""Engines that sample responses."""
