"""Reply regions, written out as token strings, for templates with and without generation blocks."""

from __future__ import annotations

import pytest
from slow_tokenizer import SlowTokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from eagle3lib import chat
from eagle3lib.errors import UserError

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'assistant' %}"
    "A:{% generation %}{{ m['content'] }}<|im_end|>{% endgeneration %}{{ '\n' }}"
    "{% else %}U:{{ m['content'] }}\n{% endif %}{% endfor %}{% if add_generation_prompt %}A:{% endif %}"
)
STRIPS_THINKING = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if loop.last %}{{ m['content'] }}{% else %}{{ m['content'].split('</think>')[-1] }}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NO_GENERATION_PROMPT = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
USER, HI = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes no"}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE with the merges that the words below need, and a post-processor that would add a BOS."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    special = [AddedToken(text, special=True) for text in ("<s>", "<|im_start|>", "<|im_end|>")]
    trainer = trainers.BpeTrainer(special_tokens=special, vocab_size=400, show_progress=False)
    trainer.initial_alphabet = pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator(["user", "assistant", "hi", "yes", "maybe", " no"] * 9, trainer)
    bos = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    core.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=True), bos])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="<|im_end|>")
    tokenizer.chat_template = CHATML
    return tokenizer


def template(tmp_path, text: str) -> str:
    path = tmp_path / "template.jinja"
    path.write_text(text)
    return str(path)


def tokens(tokenizer, rendered: chat.Rendered) -> str:
    """All tokens, separated by spaces; replies in brackets. `Ċ` is a newline, `Ġ` a space."""
    words = tokenizer.convert_ids_to_tokens(rendered.input_ids)
    for start, end in rendered.reply_bounds:
        words[start] = "[" + words[start]
        words[end - 1] += "]"
    return " ".join(words)


def test_single_turn_chatml(tokenizer):
    rendered = chat.render(tokenizer, [USER, HI])
    assert tokens(tokenizer, rendered) == (
        "<|im_start|> user Ċ hi <|im_end|> Ċ <|im_start|> assistant Ċ [yes Ġno <|im_end|>] Ċ"
    )
    assert rendered.reply_bounds == [(9, 12)]
    assert rendered.input_ids[11] == tokenizer.eos_token_id


def test_two_replies_and_adjacent_assistants_are_regions_of_their_own(tokenizer):
    maybe = {"role": "assistant", "content": "maybe"}
    rendered = chat.render(tokenizer, [USER, HI, maybe, USER, HI])
    turn = "<|im_start|> user Ċ hi <|im_end|> Ċ"
    yes, perhaps = (f"<|im_start|> assistant Ċ [{text} <|im_end|>] Ċ" for text in ("yes Ġno", "maybe"))
    assert tokens(tokenizer, rendered) == " ".join([turn, yes, perhaps, turn, yes])
    assert rendered.reply_bounds == [(9, 12), (16, 18), (28, 31)]


def test_generation_blocks(tokenizer, tmp_path):
    path = template(tmp_path, MARKED)
    rendered = chat.render(tokenizer, [USER, HI, HI, USER, HI], path)
    reply = "A : [yes Ġno <|im_end|>] Ċ"
    assert tokens(tokenizer, rendered) == f"<s> U : hi Ċ {reply} {reply} U : hi Ċ {reply}"
    assert rendered.input_ids.count(tokenizer.bos_token_id) == 1


def test_generation_block_that_leaves_the_end_of_turn_out_or_takes_the_newline_in(tokenizer, tmp_path):
    wanted = chat.render(tokenizer, [USER, HI], template(tmp_path, MARKED))
    without = MARKED.replace("<|im_end|>{% endgeneration %}", "{% endgeneration %}<|im_end|>")
    newline = MARKED.replace("{% endgeneration %}{{ '\n' }}", "{{ '\n' }}{% endgeneration %}")
    assert without != MARKED != newline
    assert chat.render(tokenizer, [USER, HI], template(tmp_path, without)) == wanted
    assert chat.render(tokenizer, [USER, HI], template(tmp_path, newline)) == wanted


def test_a_block_counts_within_what_the_prefixes_prove(tokenizer, tmp_path):
    """A header in it is prompt, be it proven or, where history is rewritten, only seen; elsewhere it is refused."""
    wanted = chat.render(tokenizer, [USER, HI, USER, HI], template(tmp_path, MARKED))
    header = MARKED.replace("A:{% generation %}", "{% generation %}A:")
    assert chat.render(tokenizer, [USER, HI, USER, HI], template(tmp_path, header)) == wanted
    rewritten = header.replace("{% for m", "{{ messages | length }}{% for m", 1)
    hidden = chat.render(tokenizer, [USER, HI, USER, HI], template(tmp_path, rewritten))
    assert tokens(tokenizer, hidden).count("A : [yes Ġno <|im_end|>] Ċ") == 2
    rewritten = rewritten.replace("<|im_end|>{% endgeneration %}", "{% endgeneration %}<|im_end|>")
    assert chat.render(tokenizer, [USER, HI, USER, HI], template(tmp_path, rewritten)) == hidden
    everything = "{% generation %}{% for m in messages %}{{ m['content'] }}{% endfor %}{% endgeneration %}"
    assert chat.render(tokenizer, [USER, HI], template(tmp_path, everything)).reply_bounds == [(1, 3)]
    question = MARKED.replace("A:{% generation %}", "A:").replace("{% endgeneration %}", "")
    question = question.replace("U:{{ m['content'] }}", "U:{% generation %}{{ m['content'] }}{% endgeneration %}")
    with pytest.raises(UserError, match="generation block of message 1 holds 'hi', which is not what the model writes"):
        chat.render(tokenizer, [USER, HI], template(tmp_path, question))


def test_blocks_must_match_replies(tokenizer, tmp_path):
    path = template(tmp_path, MARKED.replace("'assistant'", "'user'"))
    with pytest.raises(UserError, match=r"2 generation blocks for 1 replies \(messages \[1\]\)"):
        chat.render(tokenizer, [USER, HI, USER], path)


def test_train_on_last(tokenizer, tmp_path):
    assert chat.render(tokenizer, [USER, HI, USER, HI], train_on="last").reply_bounds == [(22, 25)]
    marked = chat.render(tokenizer, [USER, HI, USER, HI], template(tmp_path, MARKED), "last")
    assert tokens(tokenizer, marked).count("[") == 1 and tokens(tokenizer, marked).endswith("[yes Ġno <|im_end|>] Ċ")


def test_template_that_strips_history_is_refused_with_the_message(tokenizer, tmp_path):
    path = template(tmp_path, STRIPS_THINKING)
    thinks = {"role": "assistant", "content": "<think>hm</think>yes"}
    with pytest.raises(UserError, match=r"template\.jinja writes message 1 differently.*train_on: last"):
        chat.render(tokenizer, [USER, thinks, USER, thinks], path)
    with pytest.raises(UserError, match="writes message 3 differently.*remove what follows, regenerate"):
        chat.render(tokenizer, [USER, thinks, USER, thinks, USER], path, train_on="last")
    last = chat.render(tokenizer, [USER, thinks, USER, thinks], path, train_on="last")
    [(start, end)] = last.reply_bounds
    assert tokenizer.decode(last.input_ids[start:end]) == "<think>hm</think>yes<|im_end|>"


def test_template_without_generation_prompt_is_refused(tokenizer, tmp_path):
    with pytest.raises(UserError, match="ignores add_generation_prompt, so the header of message 1"):
        chat.render(tokenizer, [USER, HI], template(tmp_path, NO_GENERATION_PROMPT))


@pytest.mark.parametrize("fast", [True, False])
def test_token_across_a_boundary_is_refused_even_where_offsets_hide_it(tokenizer, tmp_path, fast, monkeypatch):
    """In "A: yes" the space belongs to the token `Ġyes`, whose trimmed offset says otherwise."""
    monkeypatch.setattr(type(tokenizer), "is_fast", fast)
    space = "{% for m in messages %}{{ 'U:hi\\nA: ' if m['role'] == 'user' else m['content'] }}{% endfor %}"
    no = {"role": "assistant", "content": "no"}
    ids = tokenizer("A: no", add_special_tokens=False).input_ids
    assert "Ġno" in tokenizer.convert_ids_to_tokens(ids)  # the trap is set
    with pytest.raises(chat.UnalignedReply, match="message 1: its beginning lies inside of a token"):
        chat.render(tokenizer, [USER, no], template(tmp_path, space))


@pytest.mark.parametrize("slow", [False, True])
def test_a_header_whose_tokens_depend_on_what_follows(slow, tmp_path):
    """Two newlines are one token at the end of a prompt, and two before a reply: it begins between tokens all the same.

    Nothing but the decoded tokens can show that where there are no offsets.
    """
    core = Tokenizer(models.BPE())
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    core.train_from_iterator(["\n\n", "A:", "yes"] * 9, trainer)
    newlines = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<e>")
    newlines = SlowTokenizer(newlines) if slow else newlines
    path = template(
        tmp_path, "{% for m in messages %}{{ 'U:hi A:\n\n' if m.role == 'user' else m.content }}{% endfor %}"
    )
    (prompt, whole) = (newlines(text, add_special_tokens=False).input_ids for text in ("A:\n\n", "A:\n\nyes"))
    assert newlines.convert_ids_to_tokens(prompt)[-1] == "ĊĊ" and whole[: len(prompt)] != prompt  # the trap is set
    rendered = chat.render(newlines, [USER, {"role": "assistant", "content": "yes"}], path)
    [(start, end)] = rendered.reply_bounds
    assert newlines.convert_ids_to_tokens(rendered.input_ids[start - 2 : end]) == ["Ċ", "Ċ", "yes"]


def test_multibyte_text_and_tokenizers_without_offsets_give_the_same(tokenizer, monkeypatch):
    messages = [{"role": "user", "content": "日本 é"}, {"role": "assistant", "content": " ü 🙂\n\n"}, USER, HI]
    fast = chat.render(tokenizer, messages)
    monkeypatch.setattr(type(tokenizer), "is_fast", False)
    assert chat.render(tokenizer, messages) == fast
    start, end = fast.reply_bounds[0]
    assert tokenizer.decode(fast.input_ids[start:end]) == " ü 🙂\n\n<|im_end|>"


def test_prompt_ids_are_where_the_reply_begins(tokenizer):
    rendered = chat.render(tokenizer, [USER, HI])
    prompt = chat.prompt_ids(tokenizer, [USER])
    assert prompt == rendered.input_ids[: rendered.reply_bounds[0][0]]
    assert chat.append_reply(prompt, rendered.input_ids[9:12]) == chat.Rendered(rendered.input_ids[:12], [(9, 12)])


def test_no_reply_no_region(tokenizer):
    assert chat.render(tokenizer, [USER]).reply_bounds == []


def test_reply_without_prompt(tokenizer):
    with pytest.raises(chat.UnalignedReply, match="message 0 is a reply with no prompt"):
        chat.render(tokenizer, [HI, USER])


@pytest.mark.parametrize(
    "text, said",
    [
        ("{{ raise_exception('roles must alternate') }}", "TemplateError: roles must alternate"),
        ("{% for m in messages %}", "TemplateSyntaxError"),
        ("{{ messages[0].content + 1 }}", "TypeError"),
    ],
)
def test_template_that_cannot_render(tokenizer, tmp_path, text, said):
    for call in (chat.render, chat.prompt_ids):
        with pytest.raises(UserError) as error:
            call(tokenizer, [USER, HI], template(tmp_path, text))
        assert f"chat template {tmp_path}/template.jinja cannot render" in str(error.value)
        assert said in str(error.value) and "\n" not in str(error.value)


def test_no_template(tokenizer, tmp_path):
    with pytest.raises(UserError, match="dataset.chat_template: cannot read .*nothing.jinja"):
        chat.render(tokenizer, [USER, HI], tmp_path / "nothing.jinja")
    bare = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)
    with pytest.raises(UserError, match="the target has no chat template .*dataset.chat_template"):
        chat.render(bare, [USER, HI])


def test_a_template_that_writes_bos_twice_is_refused(tokenizer, tmp_path):
    once = chat.render(tokenizer, [USER, HI], template(tmp_path, "{{ bos_token }}" + CHATML))
    assert once.input_ids.count(tokenizer.bos_token_id) == 1
    with pytest.raises(UserError, match="begins with '<s>' twice"):
        chat.render(tokenizer, [USER, HI], template(tmp_path, "{{ bos_token }}<s>" + CHATML))


def test_the_date_of_a_template_never_changes(tokenizer, tmp_path):
    dated = "{{ strftime_now('%Y-%m-%d') }}" + CHATML
    rendered = chat.render(tokenizer, [USER, HI], template(tmp_path, dated))
    assert tokenizer.decode(rendered.input_ids).startswith("2026-01-01<|im_start|>")
    prompt = chat.prompt_ids(tokenizer, [USER], template(tmp_path, dated))
    assert prompt == rendered.input_ids[: len(prompt)]


@pytest.mark.parametrize("form", ["{{ c.function.arguments | tojson }}", "{{ 'x' + c.function.arguments }}"])
@pytest.mark.parametrize("arguments", [{"at": "Oslo é"}, '{"at":"Oslo é"}'], ids=["object", "text"])
def test_arguments_become_what_the_template_wants(tokenizer, tmp_path, form, arguments):
    calls = "{% for c in m.tool_calls or [] %}f" + form + "{% endfor %}"
    path = template(tmp_path, CHATML.replace("{{ m['content'] }}", "{{ m['content'] }}" + calls))
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}
    rendered = chat.render(tokenizer, [USER, call, USER, HI], path)
    start, end = rendered.reply_bounds[0]
    assert tokenizer.decode(rendered.input_ids[start:end]).replace("x", "") == 'f{"at": "Oslo é"}<|im_end|>'


def test_options_reach_the_template(tokenizer, tmp_path):
    path = template(tmp_path, CHATML + "{% if add_generation_prompt and not thinks %}maybe{% endif %}")
    ids = [chat.prompt_ids(tokenizer, [USER], path, options=options) for options in ({"thinks": True}, {}, None)]
    assert ids[1] == ids[2] and ids[1][: len(ids[0])] == ids[0] != ids[1]


def test_a_token_that_only_history_lacks_is_not_supervised(tokenizer, tmp_path):
    """Phi's template closes the text behind the last end-of-turn token."""
    path = template(tmp_path, CHATML + "{% if not add_generation_prompt %}<s>{% endif %}")
    rendered = chat.render(tokenizer, [USER, HI, USER, HI], path)
    assert tokens(tokenizer, rendered).count("[yes Ġno <|im_end|>] Ċ") == 2


def test_thinking_is_left_out_by_the_token(tokenizer):
    """Also in the content itself; a token that holds its last character and more is not supervised."""
    thinks = {"role": "assistant", "content": "<think>hi hi</think>yes"}
    rendered = chat.render(tokenizer, [USER, thinks], reasoning=False)
    [(start, end)] = rendered.reply_bounds
    assert tokenizer.decode(rendered.input_ids[start:end]) == "</think>yes<|im_end|>"
    assert chat.render(tokenizer, [USER, HI], reasoning=False) == chat.render(tokenizer, [USER, HI])
    dropped = HI | {"reasoning_content": "yes"}  # by this template; what it says is no thinking, though it reads alike
    assert chat.render(tokenizer, [USER, dropped], reasoning=False) == chat.render(tokenizer, [USER, HI])
