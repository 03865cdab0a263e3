"""The door to vLLM: nothing else imports it."""
