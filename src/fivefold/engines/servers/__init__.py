"""Engines that run as servers in separate processes."""
