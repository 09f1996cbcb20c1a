-- Direct hand-off: a put of one task leases the task to a sleeping owner, and the hint to this owner is the lease. So
-- the owner starts the task and asks nobody. `put_one` gives the lease, and the owner's next step confirms it.
--
-- `terms` has what a put must know of each sleeping owner that may be handed a task. The terms are deleted by
-- the first hand-off and by each step of the owner. They lie only in the memory of this server. So a server that takes
-- over hands the owner no task before the owner's next step: only this step tells the owner's highest token.
--
-- `handed` in the owner's hash is the turn and the token of a lease that no step has confirmed; the turn is the time of
-- the step that made the terms. A step that names the turn confirms the lease, since only one lease has this turn. Any
-- other step gets the lease in its reply, or gives it back.

local HandOff = {terms = {}}

-- Note the terms of an owner that begins to sleep, and return their turn. `lease` is the time of its owner lease: an
-- owner that does not renew it in time is stopped, or has no connection.
function HandOff.offer(x, lease)
  HandOff.terms[x.key] = {
    turn = now, told = math.max(x.highest_token, x.last_token), until_time = now + 0.4 * lease,
    queues = #x.queues > 0 and x.named,
  }
  return now
end

-- Hint a sleeper of a line that gets a task. When no task is ready before this task, lease it to the sleeper; true when
-- this was done. `rank`, `record` and `ahead` are the arguments of `put_one`.
function HandOff.give(line, id, seq8, rank, record, envelope, ahead)
  local queue, owner, terms, token = sub(line, 2)
  local first = byte(line) == 84 and #envelope < 65536 and call('EXISTS', B .. ':r:' .. line) == 0 -- 84 is T
  local time = call('TIME')
  local leased = time[1] * 1000000 + time[2] + ahead
  local hinted = ring(line, 1, first and function(sleeper)
    owner, terms = sleeper, HandOff.terms[B .. ':o:' .. sleeper]
    if terms and (terms.until_time < leased or terms.queues and not terms.queues[queue]) then terms = nil end
    if not terms then return '' end
    token = call('INCR', B .. ':seq')
    if token <= terms.told then token = call('INCRBY', B .. ':seq', terms.told - token + 1) end -- see draw_tokens
    local timeout = flagged(byte(record, 2), TIMED) and unpk('>d', record, #record - 15) or 0
    return pack('>I8I8I4I4I4I8dI8d', terms.turn, token, 1, 0, rank, number_in(seq8), timeout, leased, 0) .. envelope
  end)
  if not (hinted and terms) then return false end
  local key = B .. ':o:' .. owner
  HandOff.terms[key] = nil
  call('HSET', K_JOB, id, seq8 .. '\3' .. sub(record, 2) .. pack('>I8I8I8I2c0', token, leased, 0, #owner, owner))
  call('HSET', B .. ':l:' .. owner, text_of(token), id)
  call('HSET', key, 'handed', pack('>I8I8', terms.turn, token))
  call('HINCRBY', B .. ':q:' .. queue, 'running', '1')
  return true
end
