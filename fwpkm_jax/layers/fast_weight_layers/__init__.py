"""The Fast Weight Layer between a decoder's last norm and its head."""
