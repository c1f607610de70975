"""Prompts of the end-to-end tests: chat, code, lists, copying and many languages."""

from __future__ import annotations

CHATS = (
    "What is the capital of France?",
    "Explain in two sentences why the sky is blue.",
    "Write a short poem about the sea.",
    "I cannot sleep. What could help?",
    "Summarise the story of Cinderella for a child.",
    "Translate 'good morning, my friend' into Spanish and German.",
    "What is 17 plus 25? Think step by step.",
    "Give me one argument for and one against homework.",
    "Who wrote Hamlet?",
    "Tell me a joke about a cat and a keyboard.",
)
LISTS = (
    "List five fruits, one per line.",
    "Name the planets of the solar system in order, numbered.",
    "Make a packing list for a weekend in the mountains.",
    "List the months of the year, separated by commas.",
    "Give three tips for writing clear e-mails as bullet points.",
)
CODE = (
    "def fibonacci(n):\n    ",
    "Write a Python function that reverses a string.",
    "SELECT name, age FROM users WHERE ",
    "#include <stdio.h>\n\nint main(void) {\n    ",
    'Write a JSON object describing a book with the keys "title", "author" and "year".',
    "for i in range(10):\n    print(i)\n\nfor j in range(20):\n    ",
)
COPIES = (
    "Repeat this identifier exactly: 9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0",
    "one two three four five six one two three four five six one two three four",
    "0, 1, 1, 2, 3, 5, 8, 13, 21, ",
    "The quick brown fox jumps over the lazy dog. The quick brown fox jumps over the",
)
LANGUAGES = (
    "日本の首都はどこですか？",
    "请用中文介绍一下长城。",
    "한국의 수도는 어디입니까?",
    "ما هي عاصمة مصر؟",
    "Какая самая длинная река в России?",
    "¿Cuál es la capital de España?",
    "Quelle est la recette des crêpes ?",
    "Wie heißt die Hauptstadt von Österreich?",
    "भारत की राजधानी क्या है?",
    "Ποια είναι η πρωτεύουσα της Ελλάδας;",
    "Tell me a story with emoji: 🐱🚀🌙",
    "🙂🙃🙂🙃🙂🙃",
)

# Sent as they are; the others through the chat template.
RAW = (*(CODE[i] for i in (0, 2, 3, 5)), *COPIES[1:], LANGUAGES[-1])
EVERYDAY = (*CHATS, *LISTS, *CODE, *COPIES, *LANGUAGES)

# Answered under grammars.
BOOK = "Describe an old book that you would like to sell."

# About 300 tokens: longer than any chunk that the tests prefill by.
LONG = "Here is a list of facts.\n" + "\n".join(
    f"{i}. The number {i} is {'even' if i % 2 == 0 else 'odd'} and {i} times two is {2 * i}."
    for i in range(1, 15)
)

DOMAINS = dict(
    chats=CHATS, lists=LISTS, code=CODE, copies=COPIES, languages=LANGUAGES, facts=(LONG,)
)


def domain(text: str) -> str:
    """Which kind of prompt `text` is."""
    return next(name for name, texts in DOMAINS.items() if text in texts)
