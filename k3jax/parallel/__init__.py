"""How work is shared by the chips of a mesh: axes, rules, collectives, exchanges of tokens."""
