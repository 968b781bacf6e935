import os
import pickle
import re

import numpy as np
import pytest

from training.data.token_files import TokenSequence
from training.data.tokenizer import save_tokenizer, saved_tokenizer, token_ids
from training.data.tokens import Tokens, TokenWindows, language_reference, load_tokens, split, windows


def write_llmc(path, ids, magic=20240520, version=1, count=None):
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, len(ids) if count is None else count
    path.write_bytes(header.tobytes() + np.array(ids, "<u2").tobytes())
    return str(path)


def write_bin(path, ids):
    path.write_bytes(np.array(ids, "<u2").tobytes())
    return str(path)


def refuses(message):
    return pytest.raises(ValueError, match=f"^{re.escape(message)}$")


def test_the_language_reference():
    tokens = load_tokens([])
    ids = np.asarray(tokens.ids)
    assert ids.dtype == np.uint8
    assert ids.tobytes() == language_reference()
    assert tokens[1:3] == (256, "Python language reference")
    assert tokens.tokenizer.decode(ids[:20].tolist()) == language_reference()[:20].decode()
    text = language_reference().decode()
    assert len(text) > 300_000
    assert 0 <= text.index('The "assert" statement') < text.index('The "yield" statement')


def test_text_files_are_bytes_one_after_another(tmp_path):
    (tmp_path / "a.txt").write_bytes("héllo\r\n".encode())
    (tmp_path / "b.md").write_text("world")
    tokens = load_tokens([str(tmp_path / "b.md"), str(tmp_path / "a.txt")])
    assert np.asarray(tokens.ids).tobytes() == b"worldh\xc3\xa9llo\r\n"
    assert tokens[1:3] == (256, "b.md + a.txt")


@pytest.mark.parametrize("write", [write_bin, write_llmc])
def test_bin_files(tmp_path, write):
    ids = [5, 50256, 0, 7]
    tokens = load_tokens([write(tmp_path / "train.bin", ids)])
    assert np.asarray(tokens.ids).tolist() == ids
    assert np.asarray(tokens.ids).dtype == np.uint16
    assert tokens[1:3] == (50257, "train.bin")
    assert tokens.tokenizer.decode(ids) == "5 50256 0 7"


def test_several_bin_files_are_concatenated(tmp_path):
    paths = [write_llmc(tmp_path / "0.bin", [1, 2]), write_bin(tmp_path / "1.bin", [3])]
    assert np.asarray(load_tokens(paths).ids).tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    ("largest", "vocab_size"),
    [(1, 50257), (50256, 50257), (50257, 50304), (50303, 50304), (50304, 50368), (65535, 65536)],
)
def test_vocab_size_of_bin_files(tmp_path, largest, vocab_size):
    path = write_bin(tmp_path / "a.bin", [0, largest])
    assert load_tokens([path], token_dtype="uint16").vocab_size == vocab_size
    assert load_tokens([path], token_dtype="uint16", vocab_size=largest + 1).vocab_size == largest + 1
    with refuses(f"vocab_size={largest} is less than the {largest + 1} of a.bin: use that, or omit it"):
        load_tokens([path], token_dtype="uint16", vocab_size=largest)


def typed(path, ids, dtype):
    np.array(ids, dtype).tofile(path)
    return str(path)


def random_ids(vocab_size, number=2000):
    return np.random.default_rng(0).integers(0, vocab_size, number)


@pytest.mark.parametrize("dtype", ["uint16", "uint32", "int32", "int64"])
def test_the_flag_decides_the_dtype(tmp_path, dtype):
    ids = [7, 0, 300, 0] * 8
    tokens = load_tokens([typed(tmp_path / "a.bin", ids, dtype)], [str(tmp_path / "a.bin")], token_dtype=dtype)
    assert np.asarray(tokens.ids).tolist() == np.asarray(tokens.val_ids).tolist() == ids


@pytest.mark.parametrize(
    ("dtype", "ids", "vocab_size"),
    [
        ("uint16", random_ids(50257), None),  # uint32 ones would exceed every vocabulary
        ("uint16", random_ids(65), None),
        ("uint16", random_ids(65), 65),
        ("uint16", random_ids(11), 11),
        ("uint16", random_ids(65536), 65536),
        ("uint16", random_ids(65536, 2001), None),  # whose size uint32 does not divide
        ("uint32", random_ids(128_256), None),  # uint16 ones would exceed GPT-2's vocabulary
        ("uint32", random_ids(200_019), None),
        ("uint32", random_ids(200_019), 200_019),
        ("uint32", random_ids(1000), 200_019),  # which uint16 does not hold
    ],
)
def test_the_only_possible_dtype_is_that_of_a_file_without_a_header(tmp_path, dtype, ids, vocab_size):
    tokens = load_tokens([typed(tmp_path / "a.bin", ids, dtype)], vocab_size=vocab_size)
    assert np.array_equal(np.asarray(tokens.ids), ids)
    assert tokens.vocab_size == (vocab_size or 50257 if ids.max() < 50257 else tokens.vocab_size)


NUMBERS = np.array([number for digit in random_ids(10, 5000) for number in (digit + 1, 0)])  # "3,1,4,"


@pytest.mark.parametrize(
    ("dtype", "ids", "vocab_size", "readings"),
    [
        ("uint16", NUMBERS, None, "10,000 tokens up to 10 as uint16, 5,000 tokens up to 10 as uint32"),
        ("uint16", NUMBERS, 11, "10,000 tokens up to 10 as uint16, 5,000 tokens up to 10 as uint32"),
        ("uint32", NUMBERS, None, "20,000 tokens up to 10 as uint16, 10,000 tokens up to 10 as uint32, 5,000 tokens"),
        ("int64", [50256], None, "4 tokens up to 50,256 as uint16, 2 tokens up to 50,256 as uint32, 1 tokens up to"),
        ("int64", [200_018, 5], 200_019, "4 tokens up to 200,018 as uint32, 2 tokens up to 200,018 as int64"),
        ("uint16", [60_000, 0] * 9, None, "18 tokens up to 60,000 as uint16, 9 tokens up to 60,000 as uint32"),
        ("uint16", [60_000, 3] * 9, None, "18 tokens up to 60,000 as uint16, 9 tokens up to 256,608 as uint32"),
    ],
)
def test_a_dtype_that_is_ambiguous_is_refused_with_the_readings(tmp_path, dtype, ids, vocab_size, readings):
    path = typed(tmp_path / "a.bin", ids, dtype)
    with pytest.raises(ValueError, match=f"^{re.escape(f'{path}: its dtype is ambiguous: {readings}')}.*; set token_d"):
        load_tokens([path], vocab_size=vocab_size)


@pytest.mark.parametrize(
    ("dtype", "ids", "vocab_size"),
    [("uint16", random_ids(65536), None), ("uint16", random_ids(66), 65), ("int32", [*random_ids(50257), -100], None)],
)
def test_tokens_that_fit_no_vocabulary_are_refused_with_the_readings(tmp_path, dtype, ids, vocab_size):
    path = typed(tmp_path / "a.bin", ids, dtype)
    message = f"{path}: no dtype fits a vocabulary of {vocab_size or 50257}: "
    with pytest.raises(ValueError, match=f"^{re.escape(message)}.* as uint16, .* as uint32.*; set token_dtype$"):
        load_tokens([path], vocab_size=vocab_size)


def test_the_dtype_of_a_large_file_is_that_of_all_its_parts(tmp_path, monkeypatch):
    """A token in the middle, in a part of which a block is read, decides."""
    monkeypatch.setattr("training.data.token_files.SAMPLE_BYTES", 64)
    ids = np.array([3, 0] * 4000)
    path = typed(tmp_path / "a.bin", ids, "uint16")
    with pytest.raises(ValueError, match="its dtype is ambiguous"):
        load_tokens([path])
    ids[4001:4032:2] = 40_000  # the block of 32 tokens that begins with token 4000
    assert np.array_equal(np.asarray(load_tokens([typed(tmp_path / "a.bin", ids, "uint16")]).ids), ids)


def test_tokens_out_of_range_by_the_flag(tmp_path):
    path = typed(tmp_path / "a.bin", [5, -100], "int32")
    with refuses("a.bin has token -100, not from 0 to 1048575: set token_dtype, or write it again"):
        load_tokens([path], token_dtype="int32")
    with refuses("a.bin has token 4294967196, not from 0 to 1048575: set token_dtype, or write it again"):
        load_tokens([path], token_dtype="uint32")
    with refuses("token_dtype=int64 is that of .bin files, and there are none: omit it"):
        load_tokens([], token_dtype="int64")


def test_a_flag_that_a_header_contradicts(tmp_path):
    path = write_llmc(tmp_path / "a.bin", [1, 2])
    assert len(load_tokens([path], token_dtype="uint16").ids) == 2
    with refuses(f"{path}: token_dtype=uint32, but uint16 by its header; omit it"):
        load_tokens([path], token_dtype="uint32")


def write_meta(folder, **changes):
    names = sorted(set("3,1,4,1,5,9,2,6,5"))
    meta = {"stoi": {name: token for token, name in enumerate(names)}, "itos": dict(enumerate(names))}
    (folder / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": len(names), **meta, **changes}))


def test_nanogpts_meta_has_the_dtype_the_vocabulary_and_the_characters(tmp_path):
    write_meta(tmp_path)
    path = typed(tmp_path / "train.bin", [3, 0, 1, 0, 4, 0] * 20, "uint16")  # as uint32 tokens, without a 0
    tokens = load_tokens([path])
    assert (len(tokens.ids), tokens.vocab_size, tokens.tokenizer.decode([3, 0, 1, 0])) == (120, 8, "3,1,")
    assert list(tokens.tokenizer.encode("4,3")) == [4, 0, 3]
    save_tokenizer(tokens.tokenizer, make(tmp_path / "out"), 8)
    assert saved_tokenizer(tmp_path / "out").decode([5]) == "5"
    with refuses(f"'x' is not a character of {tmp_path / 'meta.pkl'}: omit it"):
        tokens.tokenizer.encode("3x")
    typed(tmp_path / "train.bin", [3, 8], "uint16")
    with refuses("train.bin has token 8, but meta.pkl only 8: pass its tokenizer"):
        load_tokens([path])


def make(folder):
    folder.mkdir()
    return folder


def test_a_meta_with_only_the_number_of_tokens(tmp_path):
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": 12}))
    tokens = load_tokens([typed(tmp_path / "train.bin", [3, 0] * 20, "uint16")])
    assert (len(tokens.ids), tokens.vocab_size, tokens.tokenizer.decode([3, 0])) == (40, 12, "3 0")


class Ends:
    def __reduce__(self):
        return os.abort, ()


OTHER_METAS = {
    "a call": pickle.dumps(Ends()),
    "a call within": pickle.dumps({"vocab_size": Ends()}),
    "empty": b"",
    "text": b"text",
    "a list": pickle.dumps([1]),
    "a negative number": pickle.dumps({"vocab_size": -1}),
    "a token out of range": pickle.dumps({"vocab_size": 2, "itos": {5: "a"}}),
    "gigabytes for a memo": b"K\x01r\xff\xff\xff\x7f.",
}


@pytest.mark.parametrize("content", OTHER_METAS.values(), ids=OTHER_METAS)
def test_a_meta_that_is_not_nanogpts_is_refused_and_not_run(tmp_path, content):
    (tmp_path / "meta.pkl").write_bytes(content)
    path = typed(tmp_path / "train.bin", random_ids(65), "uint16")
    with pytest.raises(ValueError, match=r"meta.pkl: not what nanoGPT writes \(.+\); move it, and set vocab_size and"):
        load_tokens([path])


def test_a_meta_json_has_the_dtype(tmp_path):
    path = typed(tmp_path / "train.bin", [3, 0] * 20, "uint16")
    for dtype, number in (("uint16", 40), ("uint32", 20)):
        save_tokenizer(token_ids(9), tmp_path, 9, dtype)
        assert len(load_tokens([path]).ids) == number
    save_tokenizer(token_ids(9), tmp_path, 9, "float32")
    with pytest.raises(ValueError, match=r"meta.json: not what training.prepare writes .*'float32' is none of uint16"):
        load_tokens([path])


def test_files_that_are_not_there(tmp_path):
    for name in ("a.txt", "a.bin"):
        path = str(tmp_path / name)
        with refuses(f"{path}: no such file; check the path"):
            load_tokens([path])


def test_files_that_cannot_be_read(tmp_path):
    for name in ("loop.txt", "loop.bin"):
        (tmp_path / name).symlink_to(tmp_path / name)
        path = str(tmp_path / name)
        reason = "Too many levels of symbolic links"
        with refuses(f"{path}: can't be read ({reason}); check its permissions"):
            load_tokens([path])


def test_empty_files(tmp_path):
    (tmp_path / "a.txt").touch()
    (tmp_path / "a.bin").touch()
    write_llmc(tmp_path / "b.bin", [])
    for name, what in (("a.txt", "text"), ("a.bin", "tokens"), ("b.bin", "tokens")):
        path = str(tmp_path / name)
        with refuses(f"{path}: empty; pass a file with {what} in it"):
            load_tokens([path])


def test_text_that_is_not_utf8(tmp_path):
    path = tmp_path / "latin1.txt"
    path.write_bytes("abc é".encode("latin-1"))
    message = f"{path}: byte 4 is not UTF-8; convert it, or name it .bin if it holds tokens"
    with refuses(message):
        load_tokens([str(path)])


def test_text_and_tokens_do_not_mix(tmp_path):
    paths = [str(tmp_path / "a.txt"), write_bin(tmp_path / "b.bin", [1])]
    with refuses(f"{paths[1]} holds tokens and {paths[0]} text; pass files of one kind"):
        load_tokens(paths)


def test_bin_files_of_an_odd_size(tmp_path):
    path = tmp_path / "a.bin"
    path.write_bytes(b"abc")
    message = f"{path}: 3 bytes can't be uint16 tokens of 2 bytes; if it is text, rename it"
    with refuses(message):
        load_tokens([str(path)])


def test_llmc_files_that_are_not_whole(tmp_path):
    path = write_llmc(tmp_path / "a.bin", [1, 2, 3], count=4)
    message = f"{path}: 4 tokens by its header, 3 by its size; write it again"
    with refuses(message):
        load_tokens([path])
    (tmp_path / "a.bin").write_bytes((tmp_path / "a.bin").read_bytes()[:10])
    message = f"{path}: 10 bytes, less than llm.c's header of 1024; write it again"
    with refuses(message):
        load_tokens([path])


def test_other_llmc_formats(tmp_path):
    path = write_llmc(tmp_path / "b.bin", [1, 2], version=2)
    message = f"{path}: version 2 of llm.c's format; write it again as version 1"
    with refuses(message):
        load_tokens([path])


def some_tokens(n):
    return Tokens(TokenSequence([np.arange(n, dtype=np.uint16)]), 50257, "some.bin", token_ids(50257))


def test_split_validates_on_the_end():
    train, val = split(some_tokens(1000), 0.1, 8)
    assert np.asarray(train).tolist() == list(range(900))
    assert np.asarray(val).tolist() == list(range(900, 1000))


def test_split_names_the_largest_block_size():
    message = "90 tokens to train and 10 to validate on are too few for block_size=32; use block_size=9 or less"
    with refuses(f"some.bin: {message}"):
        split(some_tokens(100), 0.1, 32)
    train, val = split(some_tokens(100), 0.1, 9)
    assert len(TokenWindows(train, 9, seed=0)) > 0
    assert len(TokenWindows(val, 9, seed=None)) == 1


def test_split_errors():
    message = "5 tokens to train and 0 to validate on are too few for block_size=1; pass a longer text"
    with refuses(f"some.bin: {message}"):
        split(some_tokens(5), 0.1, 1)


def test_windows_are_inputs_and_what_follows():
    inputs, targets = windows(np.arange(100, 120, dtype=np.uint8), np.array([0, 16]), 3)
    assert inputs.tolist() == [[100, 101, 102], [116, 117, 118]]
    assert targets.tolist() == [[101, 102, 103], [117, 118, 119]]
    assert (inputs.dtype, targets.dtype) == (np.int64, np.int64)


@pytest.mark.parametrize("start", [-1, 17])
def test_windows_do_not_run_past_the_ends(start):
    message = f"a window of 3 can't start at {start} in 20 ids: use 0 to 16"
    with refuses(message):
        windows(np.arange(20), np.array([0, start]), 3)


@pytest.mark.parametrize("block_size", [1, 2, 5, 8])
@pytest.mark.parametrize("extra", [0, 1, 4])
def test_training_windows_tile_the_text_from_the_epochs_phase(block_size, extra):
    ids = np.arange(4 * block_size + extra)
    tiling = TokenWindows(ids, block_size, seed=3)
    count, phases = len(tiling), set()
    for epoch in range(60):
        tiling.set_epoch(epoch)
        assert len(tiling) == count
        inputs, targets = tiling.batch(np.arange(count))
        phase = int(inputs[0, 0])
        phases.add(phase)
        assert inputs.ravel().tolist() == list(range(phase, phase + count * block_size))
        assert (targets == inputs + 1).all()
    assert phases == set(range(block_size))
    assert count * block_size > len(ids) - 2 * block_size


def test_phases_repeat_with_the_seed():
    def phases(seed):
        tiling = TokenWindows(np.arange(1000), 100, seed)
        return [tiling.set_epoch(epoch) or int(tiling.batch(np.array([0]))[0][0, 0]) for epoch in range(10)]

    assert phases(1) == phases(1)
    assert phases(1) != phases(2)


def test_validation_windows_stay():
    tiling = TokenWindows(np.arange(21), 5, seed=None)
    tiling.set_epoch(7)
    assert tiling.batch(np.arange(len(tiling)))[0].ravel().tolist() == list(range(20))


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((9, 5, 0), "block_size=5 for 9 tokens: use 1 to 4"),
        ((9, 9, None), "block_size=9 for 9 tokens: use 1 to 8"),
        ((9, 0, None), "block_size=0 for 9 tokens: use 1 to 8"),
        ((9, 2, -1), "seed=-1 must be from 0 to 2**63 - 1"),
    ],
)
def test_windows_errors(args, message):
    with refuses(message):
        TokenWindows(np.arange(args[0]), *args[1:])


def test_epochs_are_counted_from_0():
    with refuses("epoch=-1 must be at least 0"):
        TokenWindows(np.arange(9), 2, seed=0).set_epoch(-1)
