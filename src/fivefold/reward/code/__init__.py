"""The `code` reward: tests of a program in a response, run by a process that can do nothing but compute."""
