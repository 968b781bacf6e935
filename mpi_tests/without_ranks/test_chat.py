"""Conversations as training data: chat templates, which tokens are answers, packing, and what is refused."""

import json

import numpy as np
import pytest
import torch

from examples import tiny_chat
from mpi_tests.helpers.chat import MARKED, chat_folder, loss_sum, write_rows
from training.data.chat_template import load_template
from training.data.conversations import Conversations
from training.data.packing import PackedConversations, training_windows
from training.data.tokens import load_tokens
from training.weights.hf import load_hugging_face


def turns(*words, role="user"):
    roles = (role, "assistant")
    return [{"role": roles[number % 2], "content": word} for number, word in enumerate(words)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return chat_folder(tmp_path_factory.mktemp("chat") / "model")


def tokens_of(folder, rows, **options):
    path = write_rows(folder.parent / "rows.jsonl", rows)
    return load_tokens([str(path)], tokenizer=str(folder / "tokenizer.json"), **options)


@pytest.mark.parametrize(
    ("template", "learned"), [(tiny_chat.TEMPLATE, "{}<|im_end|>\n"), (MARKED, "{}<|im_end|>")], ids=["turns", "marked"]
)
def test_a_model_learns_the_answers_alone(tmp_path, template, learned):
    folder = chat_folder(tmp_path / "model", template)
    tokens = tokens_of(folder, [{"messages": turns("one?", "1", "two?", "zwei é")}, {"messages": turns("three?", "3")}])
    library = pytest.importorskip("tokenizers").Tokenizer.from_file(str(folder / "tokenizer.json"))
    first, second = tokens.conversations[0], tokens.conversations[1]
    whole = "<|im_start|>user\none?<|im_end|>\n<|im_start|>assistant\n1<|im_end|>\n"
    whole += "<|im_start|>user\ntwo?<|im_end|>\n<|im_start|>assistant\nzwei é<|im_end|>\n"
    assert library.decode(first[0].tolist(), skip_special_tokens=False) == whole
    for (ids, is_answer), answers in ((first, ["1", "zwei é"]), (second, ["3"])):
        text = library.decode(ids[is_answer].tolist(), skip_special_tokens=False)
        assert text == "".join(learned.format(answer) for answer in answers)


def test_other_names_of_messages_and_roles_mean_the_same(folder):
    named = [{"conversations": [{"from": "human", "value": "one?"}, {"from": "gpt", "value": "1"}]}]
    ours, theirs = (tokens_of(folder, rows) for rows in ([{"messages": turns("one?", "1")}], named))
    for own, other in zip(ours.conversations, theirs.conversations, strict=True):
        assert np.array_equal(own, other)


def test_templates_render_and_mask_as_transformers_does(tmp_path):
    transformers = pytest.importorskip("transformers")
    folder = chat_folder(tmp_path / "model", MARKED)
    settings = {"bos_token": "<|im_start|>", "eos_token": {"content": "<|im_end|>"}}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), bos_token="<|im_start|>", eos_token="<|im_end|>"
    )
    messages = turns("one?", "1", "two\n<?", "é {{ 2 }}")
    encoded = theirs.apply_chat_template(
        messages, chat_template=MARKED, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    ids, is_answer = tokens_of(folder, [{"messages": messages}]).conversations[0]
    assert ids.tolist() == encoded["input_ids"]
    assert is_answer.tolist() == encoded["assistant_masks"]
    every = "{{ bos_token }}{{ messages | tojson }}{{ tools | tojson }}{{ eos_token }}{{ unk_token }}"
    every += "{% for x in messages %}{% if loop.first %}{% continue %}{% endif %}\n  {{ x.role }}\n{% endfor %}"
    every += "{% if add_generation_prompt %}?{% endif %}{{ strftime_now('%Y') }}"
    for source in (tiny_chat.TEMPLATE, every):
        (folder / "chat_template.jinja").write_text(source)
        for prompts in (False, True):
            expected = theirs.apply_chat_template(
                messages, chat_template=source, tokenize=False, add_generation_prompt=prompts
            )
            assert load_template(folder).text(messages, prompts=prompts) == expected


def test_settings_of_a_tokenizer_hold_a_template_too(folder, tmp_path):
    named = [
        {"name": "tool_use", "template": "x"},
        {"name": "default", "template": "{{ bos_token }}{{ messages[0].content }}"},
    ]
    for value in (named[1]["template"], named):
        (tmp_path / "tokenizer_config.json").write_text(
            json.dumps({"chat_template": value, "bos_token": {"content": "^"}})
        )
        assert load_template(tmp_path).text(turns("one?")) == "^one?"


@pytest.mark.parametrize("block_size", [12, 20, 64])
def test_sequences_hold_each_conversation_once_and_whole(block_size):
    lengths = np.random.default_rng(3).integers(3, 13, 40)
    pairs = [(np.arange(n) + 100 * i, np.arange(n) > 1) for i, n in enumerate(lengths)]
    packed = PackedConversations(Conversations.of(pairs), block_size)
    inputs, targets = packed.batch(np.arange(len(packed)))
    documents = packed.documents(np.arange(len(packed)), inputs, None)
    seen = []
    for tokens, wanted, numbers in zip(inputs, targets, documents, strict=True):
        for number in range(numbers.max() + 1):
            part = numbers == number
            if (wanted[part] >= 0).any():
                ids, is_answer = pairs[tokens[part][0] // 100]
                seen.append(tokens[part][0] // 100)
                assert tokens[part].tolist() == ids[:-1].tolist()
                assert wanted[part].tolist() == np.where(is_answer[1:], ids[1:], -100).tolist()
    assert sorted(seen) == list(range(40))
    assert packed.num_targets(np.arange(len(packed))) == sum(lengths - 2)
    assert packed.num_targets(np.array([1, 0])) == (targets[:2] >= 0).sum()


def test_sequences_leave_little_space():
    lengths = np.random.default_rng(4).integers(2, 40, 300)
    pairs = [(np.arange(n + 1), np.arange(n + 1) > 0) for n in lengths]
    packed = PackedConversations(Conversations.of(pairs), 64)
    assert len(packed) <= 1.02 * sum(lengths) / 64 + 1


def test_long_conversations_end_after_an_answer_that_fits():
    pairs = [(np.arange(9), np.isin(np.arange(9), answers)) for answers in ([2, 3, 7], [7, 8], [3, 8])]
    packed = PackedConversations(Conversations.of(pairs), 5)
    assert [ids.tolist() for ids, _ in packed.pairs] == [[0, 1, 2, 3], [0, 1, 2, 3]]
    assert packed.notice == (
        "2 conversations in 2 sequences of block_size=5; too long for it: 2 cut after an answer, 1 skipped"
    )
    with pytest.raises(ValueError, match="no conversation has an answer within block_size=2 tokens: use a larger one"):
        PackedConversations(Conversations.of(pairs), 2)


def test_a_packed_sequence_has_the_losses_of_its_conversations(folder):
    """Of a Llama, whose rotations make the place in a sequence irrelevant."""
    model = load_hugging_face(folder).double()
    rows = tiny_chat.conversations()[:6]
    conversations = tokens_of(folder, rows).conversations
    packed = PackedConversations(conversations, 128)
    assert len(packed) < len(rows)
    indices = np.arange(len(packed))
    inputs, targets = packed.batch(indices)
    numbers = packed.documents(indices, inputs, None)
    _, loss = model(*map(torch.from_numpy, (inputs, targets)), documents=torch.from_numpy(numbers))
    alone = [
        loss_sum(model, torch.from_numpy(ids.astype(int)), torch.from_numpy(is_answer))
        for ids, is_answer in conversations
    ]
    assert loss.item() == pytest.approx(sum(alone).item() / packed.num_targets(indices), rel=1e-12)


def test_the_last_conversations_are_for_validation(folder):
    rows = tiny_chat.conversations()
    tokens = tokens_of(folder, rows)
    windows, val_windows = training_windows(tokens, 0.1, 64, seed=1)
    assert (len(windows.pairs), len(val_windows.pairs)) == (18, 2)
    ids, is_answer = tokens.conversations[18]
    assert np.array_equal(val_windows.prompt, ids[: is_answer.argmax()])


BAD_ROWS = [
    (
        {"messages": turns("one?", "1")[:1]},
        "line 2: no message of the assistant, which is what a model learns: add one",
    ),
    ({"messages": [{"role": "user"}]}, "line 2: message 1 has no text in role and content, or from and value: add it"),
    ({"text": "x"}, "line 2: no list of messages in messages or conversations: add it, or omit the row"),
    ([], "line 2: no list of messages in messages or conversations"),
]


@pytest.mark.parametrize(("row", "words"), BAD_ROWS)
def test_rows_that_are_no_conversations(folder, row, words):
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        tokens_of(folder, [{"messages": turns("one?", "1")}, row])
    assert words in str(caught.value)
    assert str(caught.value).startswith(str(folder.parent / "rows.jsonl"))
    assert "\n" not in str(caught.value)


NO_ROLES = "{{ messages | selectattr('role', 'in', ['user', 'assistant']) | map(attribute='content') | join(';') }}"
BAD_TEMPLATES = {
    "no answers": (
        "{{ messages[0].content }}",
        "user",
        "has no answer in it: no message of it changes the text; use an",
    ),
    "unknown role": (NO_ROLES, "critic", "does not know the role 'critic': no message of it changes the text; use an"),
    "refused": ("{{ raise_exception('no ' + messages[0].role) }}", "critic", "refuses it (no critic); change the mess"),
    "undefined": ("{{ messages[0].content.missing.deep }}", "user", "refuses it ("),
    "unsafe": ("{{ cycler.__init__.__globals__ }}", "user", "refuses it (access to attribute '__init__'"),
    "changing": (
        "{% for m in messages %}{{ loop.revindex }}{{ m.content }}{% endfor %}",
        "user",
        "changes message 2 once others follow it: mark answers there by {% generation %}",
    ),
    "syntax": ("{% if %}", "user", "not a chat template ("),
}


@pytest.mark.parametrize(("template", "role", "words"), BAD_TEMPLATES.values(), ids=BAD_TEMPLATES)
def test_templates_that_do_not_fit(tmp_path, template, role, words):
    folder = chat_folder(tmp_path / "model", template)
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        tokens_of(folder, [{"messages": turns("one?", "1", "two?", "2", role=role)}])
    assert f"{folder / 'chat_template.jinja'}" in str(caught.value)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_else_does_not_fit(folder, tmp_path):
    rows, text = write_rows(tmp_path / "rows.jsonl", [{"messages": turns("one?", "1")}]), tmp_path / "text.txt"
    text.write_text("text")
    with_template, without = folder / "tokenizer.json", tmp_path / "tokenizer.json"
    without.write_text(with_template.read_text())
    needs = f"{rows} holds conversations, which need a tokenizer.json and a chat template in its folder"
    kinds = f"{rows} holds conversations and {text} text; pass files of one kind"
    for paths, tokenizer, words in (
        ([[rows]], "bytes", f"{needs}, but tokenizer=bytes: set init_from or tokenizer"),
        ([[rows]], without, f"{tmp_path}: no chat template, which conversations need: add chat_template.jinja, or"),
        ([[rows, text]], with_template, kinds),
        ([[rows], [text]], with_template, "one of rows.jsonl and text.txt holds conversations: pass data of one kind"),
    ):
        with pytest.raises(ValueError) as caught:  # noqa: PT011
            load_tokens(*([str(path) for path in some] for some in paths), tokenizer=str(tokenizer))
        assert words in str(caught.value)
