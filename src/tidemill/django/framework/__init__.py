"""The backend for Django's tasks framework: tasks of the framework become jobs of tidemill."""
