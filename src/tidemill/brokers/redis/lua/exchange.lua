-- An exchange: note, settle, touch, take and lease, in that order, as one step of an owner. The steps are in request,
-- report, reply, claim and claim_queues.
--
-- ARGV  5 owner, 6 serial, the highest token it ever had, and epoch, packed, 7 microseconds of its owner lease, inf if it is elsewhere;
--         the serial 0 is that of who speaks on behalf of one elsewhere, and gets what it hands in answered, and no more
--       8 the want, or empty: count, mode (0 fair, 1 strict, 2 merged), kinds (1 tasks, 2 messages, 4 lost ones), sleep
--       9 how many schedules it would see to, 10 queues of the want, then these
--       n verdicts: (token, outcome, delay, started, ended, hold, sizes of error and traceback, followers)
--         rank or -1, with error, traceback and result behind; then its followers, four arguments each
--       n touches: (token, seconds)
--       n notes: (token, done, total, time) with the line behind
--       n leases to take from the carrier: token with the id behind
--       the highest number of an unknown task that it has heard of, -1 if it does not ask; n tasks that it knows of those
--       empty, or, if it asks for strays, 'held' and the tokens of all leases that it has, 8 bytes each
-- Returns 0 when the owner is not on the list (or is there anew); {'moved', where}; {'late', serial} when that was done
--       since; else settled and touched ('0' and '1'; '2' for a verdict whose result there was no room for), leases (fixed
--       part, envelope, …), commands, microseconds until something is due (-1 never), and until the
--       next of the other owners is to be given up; which leases have inputs, and those (id, state, result,
--       error, …); schedules (name, record, …); how the list of owners stands; taken ('0' and '1');
--       the highest number of an unknown task that it has heard of by now, and the names that are new;
--       1 when the step before this one is not known here, or the line broke; tokens of strays

-- The reply to somebody who speaks for an owner on another machine: only what became of the report.
local function reply_on_behalf(x)
  Limits.sync()
  finish_step()
  return {table.concat(x.settled), table.concat(x.touched)}
end

-- One step of an owner, as a list of steps.
local function exchange()
  local x = open_exchange()
  if not x then return 0 end
  local earlier = earlier_reply(x)
  if earlier then return earlier end
  read_want(x)
  if x.moved and x.consumer and x.wanted > 0 then return x.moved end
  read_request(x)
  find_strays(x)
  x.more = come_due(true)
  apply_report(x)
  apply_changes()
  take_carried(x)
  claim(x)
  prune_a_little(x)
  if x.on_behalf then return reply_on_behalf(x) end
  return reply(x)
end

function Verbs.exchange() return exchange() end

function Verbs.exchange_kept() return exchange() end

-- The same while the server is out of memory: see out_of_memory.lua.
function Verbs.exchange_pressed()
  Memory.pressed = true
  return exchange()
end
