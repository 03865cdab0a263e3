"""The models' own chat templates, as trl's wheel has them (Apache-2.0); `make test-environments`."""

from __future__ import annotations

import os
import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from fivefold.data.chat_template import common_length
from fivefold.data.dialog import Dialog, History
from fivefold.data.tool_calls import ToolCall
from fivefold.errors import UserError
from tests.data.test_dialog import TOOL, dialog_of

pytestmark = pytest.mark.environments


def templates() -> list[Path]:
    """The chat templates of the environment's trl, or of a directory that TRL_TEMPLATES names."""
    spec = find_spec("trl")
    directories_of_trl = [str(Path(spec.origin).parent / "chat_templates")] if spec and spec.origin else []
    place = os.environ.get("TRL_TEMPLATES", *directories_of_trl)
    return sorted(path for path in Path(place or ".").glob("*.jinja") if not path.stem.endswith("_training"))


WITH_TOOLS = {
    "qwen2_5": "json", "qwen3": "json", "qwen3_instruct_2507": "json", "qwen3_vl": "json",
    "qwen3_5_think": "xml", "qwen3_5_nothink": "xml", "qwen3_6": "xml", "qwen3_8": "xml",
    "nemotron_3_nano": "xml", "nemotron_3_super": "xml", "nemotron_3_ultra": "xml", "nemotron_3_5_lightning": "xml",
    "llama3_1": "whole", "llama3_2": "whole", "glm4moe": "pairs", "deepseekv3": "deepseek", "gptoss": "harmony",
    "gemma4": "gemma", "gemma4_v2": "gemma", "gemma4_v3": "gemma", "gemma4_v4": "gemma", "gemma4_v5": "gemma",
    "diffusion_gemma": "gemma",
}  # fmt: skip
"""Template -> parser that reads the calls it writes."""
WITHOUT_TOOLS = {
    "cohere", "cohere2", "deepseek_r1_distill", "gemma", "gemma3", "lfm2", "lfm2_2_5", "lfm2_2_5_v2", "lfm2_2_5_vl", "lfm2_v2",
    "llama3", "phi3", "phi3_5", "qwen2_5_vl",
}  # fmt: skip
RENDERED = {"gptoss", "muse_glimmer"}
"""Templates whose turns end with another token than that at which the engine stops."""
REFUSED = {"idefics3", "smolvlm", "llava_next"}
"""Templates that take no text as the content of a message."""
KEPT = {"cohere", "cohere2", "gemma", "gemma3", "gemma4", "gemma4_v2", "gemma4_v3", "gemma4_v4", "gemma4_v5",
        "lfm2", "lfm2_v2", "llama3", "llama3_1", "llama3_2", "phi3", "phi3_5", "qwen2_5", "qwen2_5_vl", "qwen3_8",
        "qwen3_instruct_2507", "qwen3_vl"}  # fmt: skip
"""Templates that render a turn as it was sampled, with its thinking."""
DROPS_THINKING = {"glm4moe", "lfm2_2_5", "lfm2_2_5_v2", "lfm2_2_5_vl"}
"""Templates that render a turn without thinking as it was sampled. The others change earlier turns in more than that."""

FIRST_ANSWERS_DIFFER = {"deepseekv3"}
"""Templates that write what comes before a tool's answer for the first answer of a conversation alone."""


@cache
def dialog(stem: str, has_tools: bool, history: History) -> Dialog:
    (text,) = (path.read_text() for path in templates() if path.stem == stem)
    return dialog_of(text, (TOOL,) if has_tools else (), history)


def test_every_template_of_the_wheel_has_a_row():
    assert {path.stem for path in templates()} == {*WITH_TOOLS, *WITHOUT_TOOLS, *REFUSED, "muse_glimmer"}


@pytest.mark.parametrize("stem", sorted(REFUSED))
def test_a_template_for_images_is_refused(stem):
    for history in ("append", "template"):
        with pytest.raises(UserError, match=r"leaves out what the model says|refuses"):
            dialog(stem, False, history)


@pytest.mark.parametrize("stem", sorted(RENDERED))
def test_a_template_whose_turns_end_otherwise_is_refused_with_the_cure(stem):
    with pytest.raises(UserError, match=r"no token at which the engine stops.*set environment.history: template"):
        dialog(stem, False, "append")


@pytest.mark.parametrize("stem", sorted(WITHOUT_TOOLS))
def test_tools_are_refused_where_no_parser_reads_what_the_template_writes(stem):
    with pytest.raises(UserError, match=r"leaves out tool calls|no parser reads the tool calls|refuses"):
        dialog(stem, True, "append")


@pytest.mark.parametrize("stem", sorted(WITH_TOOLS))
def test_calls_are_read_by_the_parser_that_reads_them_back(stem):
    from fivefold.data.tool_calls import PARSERS

    assert dialog(stem, True, "template").reader.parser is PARSERS[WITH_TOOLS[stem]]


@pytest.mark.parametrize("stem", sorted({*WITH_TOOLS, *WITHOUT_TOOLS} - RENDERED))
def test_check_names_the_difference_where_a_template_changes_turns(stem):
    difference = dialog(stem, stem in WITH_TOOLS, "append").history_difference()
    assert (difference is None) == (stem in KEPT)
    assert difference is None or re.match(r"from turn [23] on, .*the assistant's turn [12]: ", difference)


PHASES = (Phase.explicit, Phase.generate)
# A text that begins with a brace is a call for the parser `whole`.
WORDS = (
    st.text("abc 1.,:-'\"<>{}[]\\\n\u00e9\u6f22\U0001f600", min_size=1, max_size=8)
    .map(str.strip)
    .filter(lambda text: text and text[0] != "{")
)
ARGUMENTS = st.fixed_dictionaries(
    {"a": st.integers(-99, 99)}, optional={"words": st.lists(WORDS, max_size=2), "kind": st.sampled_from("xy")}
)


def calls_of(stem: str) -> st.SearchStrategy[list[ToolCall]]:
    """The calls of a turn; some templates write one at most."""
    most = {None: 0, "whole": 1, "harmony": 1}.get(WITH_TOOLS.get(stem), 2)
    return st.lists(ARGUMENTS.map(lambda arguments: ToolCall("add", arguments)), max_size=most)


def answered_turn(one: Dialog, data: st.DataObject, stem: str) -> tuple[dict, list[int], list, list[ToolCall]]:
    """(a turn, its tokens as the template writes it, with its end; what answers it; its calls)."""
    calls = data.draw(calls_of(stem))
    message = one.template.turn("" if calls else data.draw(WORDS), calls)
    question = [{"role": "user", "content": "Q"}]
    before, whole = one.template.render(question, True), one.template.render([*question, message], False)
    tokens = one.template.encode(whole[common_length(before, whole) :])
    end = next((place + 1 for place, token in enumerate(tokens) if token in one.template.ends), len(tokens))
    answers = [
        {"role": "tool", "content": data.draw(WORDS), "name": "add", "tool_call_id": f"call{number:05}"}
        for number in range(len(calls))
    ]
    return message, tokens[:end], answers or [{"role": "user", "content": data.draw(WORDS)}], calls


@pytest.mark.parametrize("stem", sorted({*WITH_TOOLS, *WITHOUT_TOOLS} - RENDERED))
@settings(max_examples=12, deadline=None, phases=PHASES)
@given(data=st.data())
def test_conversations_extend_to_the_template_s_rendering_or_check_says_where_not(stem, data):
    has_tools = stem in WITH_TOOLS
    one = dialog(stem, has_tools, "append")
    messages = [{"role": "user", "content": data.draw(WORDS)}]
    held, _ = one.begin(messages)
    for _ in range(data.draw(st.integers(1, 4))):
        message, tokens, answers, calls = answered_turn(one, data, stem)
        follow = one.follow(answers, calls)
        held += tokens[: -1 if tokens[-1] in one.template.ends else None] + follow
        assert one.read(tokens).calls == calls
        messages += [message, *answers]
        rendered = one.template.encode(one.template.render(messages, True))
        # What follows a turn is what the template writes there, whatever it makes of the turns before.
        assert rendered[-len(follow) :] == follow or stem in FIRST_ANSWERS_DIFFER
        assert held == rendered or stem not in KEPT | DROPS_THINKING
        held = rendered


@pytest.mark.parametrize("stem", sorted({*WITH_TOOLS, *WITHOUT_TOOLS}))
@settings(max_examples=12, deadline=None, phases=PHASES)
@given(data=st.data())
def test_conversations_that_are_rendered_again_are_read_as_the_template_renders_them(stem, data):
    has_tools = stem in WITH_TOOLS
    one = dialog(stem, has_tools, "template")
    messages = [{"role": "user", "content": data.draw(WORDS)}]
    held, _ = one.begin(messages)
    for _ in range(data.draw(st.integers(1, 4))):
        _, tokens, answers, calls = answered_turn(one, data, stem)
        answer = one.read(tokens)
        assert answer.calls == calls
        held += tokens
        messages += [answer.message, *answers]
        rendered = one.again(messages)
        added = one.continued(held, rendered)
        assert added is not None or stem not in KEPT
        held = rendered if added is None else held + added
        assert held == rendered
