"""The command ``easydist``. Its modules load torch and rich only if the command that runs needs them."""
