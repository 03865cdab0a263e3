"""Columns that SkyRL's SFT program reads besides a row's messages (sft_trainer.py, tokenize_chat_example)."""

from __future__ import annotations

from tests.support.dialects import config

SFT = ("-m=skyrl.train.main_sft", "max_length=512", "train_datasets=[a/b]", "train_dataset_splits=[train]")


def test_skyrl_sft_reads_system_messages_and_tools_from_its_columns_or_named_ones():
    usual, named = (config("skyrl", *SFT, *words).data for words in ((), ("system_key=rule", "tools_key=functions")))
    assert (usual.messages_key, usual.system_key, usual.tools_key) == ("messages", "system", "tools")
    assert (named.system_key, named.tools_key) == ("rule", "functions")
    off = config("skyrl", *SFT, "system_key=null", "tools_key=null").data
    assert (off.system_key, off.tools_key) == (None, None)
