"""Whether a test run was asked for all cases, of which an ordinary one takes some."""

from hypothesis import settings

IS_MANY = settings.get_current_profile_name() == "many"
"""--hypothesis-profile=many"""
