"""Engines that listen in processes of their own."""
