-- Jobs by number: draw numbers for jobs, or lease named jobs to a consumer.
--
-- ARGV  5 owner, 6 packed: the owner's highest token ever, epoch; then ids. Or 5 '', 6 how many numbers to draw
-- Returns for ids: {fixed part of its lease, envelope} or 0 for each id; for numbers: the last number; or
--       {'moved', where}.

-- Lease a job to a consumer; 0, or the lease as `exchange` shows it.
local function lease_one(j, owner, told)
  if j.partition then return 0 end
  if (j.state == SCHEDULED or j.state == FAILED) and not retry(j, false, 0) then return 0 end
  if j.state ~= READY then return 0 end
  unplace(j)
  if j.expires > 0 and j.expires <= now then
    finish(j, EXPIRED, TOO_LATE)
    return 0
  end
  local token, row = call('INCR', B .. ':seq'), row_of(j.queue)
  if token <= told then token = call('INCRBY', B .. ':seq', told - token + 1) end -- see draw_tokens
  local ttr = j.ttr > 0 and j.ttr or 60
  local lease = {pack('>I8I4I4I4I8dI8d', token, j.attempt + 1, j.losses, j.rank, j.seq, j.timeout, now, ttr),
    call('HGET', K_ENV, j.id)}
  if row.limiter then QueueLimits.take(row, 1) end
  j.state, j.token, j.leased, j.owner, j.deadline = RUNNING, token, now, owner, now + math.floor(ttr * 1000000)
  add_due(j.deadline, 'l' .. j.id)
  call('HSET', B .. ':l:' .. owner, text_of(token), j.id)
  count(j.queue, 'running', 1)
  save(j)
  return lease
end

function Verbs.job_numbers()
  local again = cached_reply() or departure()
  if again then return again end

  if ARGV[5] == '' then return cache_reply(call('INCRBY', B .. ':numbers', ARGV[6])) end
  local owner, told, epoch = ARGV[5], unpk('>I8I2c0', ARGV[6])
  local leases, mine = {}, call('HGET', B .. ':o:' .. owner, 'epoch') == epoch
  come_due()
  for i = 7, #ARGV do
    local j = mine and load_job(ARGV[i])
    leases[i - 6] = j and lease_one(j, owner, told) or 0
  end
  finish_step()
  return cache_reply(leases)
end
