"""A catalogue of misdeeds of tasks, and a rig that tries each in a real worker.

``make abuse`` tries every misdeed in every pool and writes ``docs/misdeeds.md``.
"""
