"""`make bench`: every measurement, one after the other."""

from course.bench import checks, lm

if __name__ == "__main__":
    checks.main()
    lm.main()
