"""The command ``easydist``. Its modules load torch and rich only where a command runs that needs them."""
