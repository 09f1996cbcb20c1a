-- An exchange: note, settle, touch and lease, in that order, as one step of an owner. The parts of the step are
-- in request, report, reply, claim and claim_queues.
--
-- ARGV  5 owner
--       6 packed: serial, the owner's highest token ever, turn of the lease that it confirms or 0, epoch. The serial 0
--         marks a caller that speaks on behalf of a remote owner: it only reports
--       7 microseconds of its owner lease, inf for a remote owner
--       8 the want, or empty: count, mode (0 fair, 1 strict, 2 merged), kinds (1 tasks, 2 messages, 4 suspects, 8 if a
--         put may lease to it), sleep
--       9 number of schedules the owner would handle, 10 number of queues in the want, then these queues
--       n verdicts: (token, outcome, delay, started, ended, hold, sizes of error and traceback, number of followers,
--         rank or -1), then error, traceback and result; after each verdict its followers, four arguments each
--       n touches: (token, seconds)
--       n notes: (token, done, total, time), then the line of the log
--       empty, or 'held' and the tokens of all leases that the owner has, 8 bytes each, if it asks for strays
--       n rows of history
-- Returns 0 when the owner is not attached, or was attached anew
--       'due' when `housekeeping` must go on
--       {'moved', where}
--       {'late', serial} when a later step was done
--       else {settled and touched ('0' and '1'), leases (fixed part, envelope, …), commands,
--         microseconds until something is due (-1 never), inputs (place of a lease, {id, state, result, error, …}, …),
--         schedules (now, name, record, …), state of the list of owners or '',
--         1 when the step before this one is not known here or this one is a repetition, tokens of strays,
--         turn of the terms for a hand-off or 0}

-- The reply to a caller on behalf of a remote owner: only the outcome of the report.
local function reply_on_behalf(x)
  Limits.sync()
  finish_step()
  return {table.concat(x.settled), table.concat(x.touched)}
end

-- One step of an owner: its parts in their order.
function Verbs.exchange()
  local x = open_exchange()
  if not x then return 0 end
  local earlier = earlier_reply(x)
  if earlier then return earlier end
  read_want(x)
  if x.moved and x.consumer and x.wanted > 0 then return x.moved end
  if come_due() then -- due jobs that have not moved would miss their turn
    finish_step()
    return 'due'
  end
  read_request(x)
  find_strays(x)
  apply_report(x)
  apply_changes()
  claim(x)
  prune_a_little(x)
  if x.on_behalf then return reply_on_behalf(x) end
  return reply(x)
end

-- For steps with verdicts or notes: a server that is out of memory refuses this function.
Verbs.exchange_kept = Verbs.exchange
