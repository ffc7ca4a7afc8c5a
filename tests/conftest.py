pytest_plugins = ["easydist.testing.plugin"]
