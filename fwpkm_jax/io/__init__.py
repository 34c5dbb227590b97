"""Files and the terminal: what comes in from outside, and what goes out."""
