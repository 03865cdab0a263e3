#!/bin/sh
# A tiny model learns a guessing game of several turns: data, tokenizer, model, GRPO. Everything is written to ./guessing.
set -eu
SEED=${SEED:-0}
rm -rf guessing/data guessing/tokenizer guessing/model guessing/runs
python3 examples/guessing/rows.py guessing/data
fivefold train-tokenizer char --data guessing/data/train.jsonl --out guessing/tokenizer
fivefold init-model qwen3 --tokenizer guessing/tokenizer --hidden 64 --layers 2 --ffn 128 --seed "$SEED" --out guessing/model
fivefold train examples/guessing/grpo.yaml trainer.seed="$SEED"
