#!/bin/sh
# A tiny model learns from what an agent does with it: data, tokenizer, model, GRPO. Everything is written to ./agent.
set -eu
SEED=${SEED:-0}
rm -rf agent/data agent/tokenizer agent/model agent/runs
python3 examples/guessing/rows.py agent/data
fivefold train-tokenizer char --data agent/data/train.jsonl --out agent/tokenizer
fivefold init-model qwen3 --tokenizer agent/tokenizer --hidden 64 --layers 2 --ffn 128 --seed "$SEED" --out agent/model
fivefold train examples/agent/grpo.yaml trainer.seed="$SEED"
