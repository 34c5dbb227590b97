"""A small sample of public-domain text, so that configs of text run without other files.

Training text: "Lady Susan" by Jane Austen (1775-1817) and "The Legend of Sleepy Hollow" by
Washington Irving (1783-1859), 197 kB. Validation text: "The Diamond Lens" by Fitz James O'Brien
(1828-1862), 53 kB. The books came from github.com/mlschmitt/classic-books-markdown. Their
copyright has expired: the authors died more than 150 years ago.
"""

TRAIN = "package:sample/train.jsonl"
"""Path of the training text, for `TextData`."""
VALID = "package:sample/valid.jsonl"
"""Path of the validation text."""
