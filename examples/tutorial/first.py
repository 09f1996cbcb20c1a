from tasks import greet

job = greet.enqueue("Ada")
print(job.id, job.state)
