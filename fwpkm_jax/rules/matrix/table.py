"""The tables of docs/explanation/family.md, from what the rules declare.

`python -m fwpkm_jax.rules.matrix.table` prints them.
"""

from collections.abc import Sequence

from fwpkm_jax.rules.matrix import MATRIX_RULES

_STRENGTHS = {
    **{False: "none", True: "yes"},
    **{"head": "one", "pair": "per pair of keys", "key": "per key", "value": "per value"},
}


def family_tables() -> str:
    """Markdown: each rule's transition, input and read-out; each rule's loss and gates."""
    forms = {name: rule.form for name, rule in MATRIX_RULES.items()}
    transitions = [
        (f"`{name}`", form.left, form.right, form.written, form.read, form.source)
        for name, form in forms.items()
    ]
    losses = [
        (form.name, form.loss, form.step_size, rule.decay, ", ".join(_STRENGTHS[x] for x in parts))
        for form, rule in zip(forms.values(), MATRIX_RULES.values(), strict=True)
        for parts in [rule.strength if isinstance(rule.strength, tuple) else (rule.strength,)]
    ]
    head = ("mixer", "$L_t$", "$R_t$", "$C_t$", "read-out", "source")
    below = ("rule", "local loss at $W_{t-1}$", "step", "decay per", "strength")
    return f"{_table(head, transitions)}\n\n{_table(below, losses)}\n"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    print(family_tables())
