#!/bin/sh
# A tiny model learns to walk over a frozen lake: data, tokenizer, model, GRPO. Everything is written to ./frozenlake.
set -eu
SEED=${SEED:-0}
rm -rf frozenlake/data frozenlake/tokenizer frozenlake/model frozenlake/runs
python3 examples/frozenlake/rows.py frozenlake/data
fivefold train-tokenizer char --data frozenlake/data/train.jsonl --out frozenlake/tokenizer
fivefold init-model qwen3 --tokenizer frozenlake/tokenizer --hidden 64 --layers 2 --ffn 128 --seed "$SEED" --out frozenlake/model
fivefold train examples/frozenlake/grpo.yaml trainer.seed="$SEED"
