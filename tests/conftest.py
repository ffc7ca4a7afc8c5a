from hypothesis import HealthCheck, settings

pytest_plugins = ["easydist.testing.plugin"]

settings.register_profile("easydist", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("easydist")
