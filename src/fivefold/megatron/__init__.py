"""The only entry point to Megatron-Core: no other package imports it."""

import warnings

# Megatron-Core warns at import that Transformer Engine and apex are missing, which we do not need, and calls collectives
# by names that newer releases of torch have renamed.
warnings.filterwarnings("ignore", message=".*(Transformer Engine|Apex).*")
warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed.*")
