"""What may not be an adapter's name, wherever one is given."""

NO_NAMES = (
    *("", " ", " a", "a ", "a,b", ",", "x" * 257),
    *("a\n", "a\nb", "a\0", "\x7f", "\u0085", "\u202e", "a\u2028b", "\ud800"),
)
