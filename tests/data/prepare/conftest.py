import json

import pytest
import tokenizers

from fwpkm_jax.data.prepare import prepare
from fwpkm_jax.io.status_line import StatusLine


class Silence:
    def isatty(self):
        return False

    def write(self, text):
        return len(text)

    def flush(self):
        pass


@pytest.fixture
def texts_of(tmp_path):
    """What a source's documents say, read back from the tokenised file that it gives."""

    def read(source, **arguments):
        from fwpkm_jax.data import TokenFile, load_tokenizer

        out = tmp_path / "prepared" / f"{source.name}.bin"
        arguments = {"tokenizer": "bytes", "layout": "stream", **arguments}
        prepare(source, out=out, status=StatusLine(Silence()), **arguments)
        file = TokenFile(out, vocab_size=257)
        entries = [file.entry(index) for index in range(file.num_entries)]
        for suffix in (".bin", ".idx", ".json"):
            out.with_suffix(suffix).unlink()
        assert all(entry[-1] == 256 for entry in entries)
        return [load_tokenizer("bytes").decode(entry) for entry in entries]

    return read


@pytest.fixture
def goes_on():
    """Checks that reading a part can start again at each of its documents; returns these."""

    def check(part):
        from fwpkm_jax.data import load_tokenizer
        from fwpkm_jax.data.json_lines import START

        tokenizer = load_tokenizer("bytes")
        pieces = list(part.read(tokenizer, START))
        for number, piece in enumerate(pieces):
            assert list(part.read(tokenizer, piece.place)) == pieces[number:]
        return pieces

    return check


@pytest.fixture(scope="session")
def vocabulary(tmp_path_factory):
    """A vocabulary of GPT-2's shape: the 256 bytes, 50,000 pieces of four of them, and the end."""
    symbols = [chr(byte) for byte in (*range(33, 127), *range(161, 173), *range(174, 256))]
    symbols += [chr(256 + index) for index in range(68)]
    letters = symbols[32:58]
    merged = (
        f"Ġ{a}{b}{c}" for a in symbols[:94] for b in letters for c in letters
    )  # Space and three.
    pieces = [*symbols, *(next(merged) for _ in range(50_000)), "<|endoftext|>"]
    path = tmp_path_factory.mktemp("gpt2") / "tokenizer.json"
    model = tokenizers.models.BPE({piece: number for number, piece in enumerate(pieces)}, [])
    made = tokenizers.Tokenizer(model)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens([tokenizers.AddedToken(pieces[-1], special=True, normalized=False)])
    made.save(str(path))
    path.with_name("config.json").write_text(json.dumps({"eos_token_id": len(pieces) - 1}))
    return str(path)
