"""stub"""

NAME = "gguf"


def matches(source):
    return False
