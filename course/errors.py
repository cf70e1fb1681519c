"""The one exception that a reader of the command line is meant to see."""


class CourseError(Exception):
    """A problem the user can solve: one line that says what is wrong and what to do.

    The command line prints it without a traceback and exits with status 2.
    """
