-- Admin calls: act on jobs by their ids, and on queues.
--
-- ARGV  5 verb
--       cancel   6 'cancel', 'terminate', or the error of a purge, then ids     delete   6 '', then ids
--       retry    6 '1' with force, '2' for scheduled jobs only, else '0', a space, due time or '0', then ids
--       alter    6 rank or '', a space, queue or '', then ids
--       queue    6 queue, 7 paused: '', '0', '1', 8 max_size: '' or a number
--       forget   6 queue
-- Returns {reply, 1 when `housekeeping` must go on, else 0}, or {'moved', where}. The reply is '0', '1' or '2' for each id;
--       queue 0; forget 1 or 0;

local function cancel(j)
  local purged = sub(ARGV[6], 1, #PURGED) == PURGED
  if j.state >= SUCCEEDED or purged and j.state == RUNNING then return false end
  if j.state == RUNNING then
    if not flagged(j.flags, CANCELLING) then j.flags = j.flags + CANCELLING end
    save(j)
    log(j, ARGV[6] == 'terminate' and 'cancel was asked for, at once' or 'cancel was asked for', now / 1000000)
    call('RPUSH', B .. ':c:' .. j.owner, pack('>I8', j.token) .. ARGV[6])
    hint_owner(j.owner)
  else
    unplace(j)
    finish(j, CANCELLED, purged and ARGV[6] or NOT_STARTED)
    if purged then
      count(j.queue, 'cancelled', -1)
      count(j.queue, 'purged', 1)
    end
  end
  return true
end

local function delete(j)
  if j.state >= SUCCEEDED then
    if j.key ~= '' then Unique.forget(j) end
    unfinish(j)
  else
    if j.state == RUNNING then end_lease(j) else unplace(j) end
    leave(j, WAITING)
  end
  forget(j)
  return true
end

-- Change a queue's settings, and wake all callers that the old settings kept waiting.
local function set_queue(queue, paused, max_size)
  local row = row_of(queue)
  if paused ~= '' then row.paused = paused == '1' end
  if max_size ~= '' then row.max_size = tonumber(max_size) end
  call('HSET', row.key, 'paused', row.paused and '1' or '0', 'max_size', row.max_size)
  for _, kind in ipairs(KINDS) do
    local line = kind .. queue
    if row.paused then
      call('ZREM', K_LINES, line)
    elseif call('EXISTS', B .. ':r:' .. line) == 1 then
      call('ZADD', K_LINES, 0, line)
      rings[line] = call('ZCARD', B .. ':r:' .. line)
    end
  end
  shrunk[queue] = true
end

-- Forget the counters and settings of a queue; its limit stays. Returns 1, or 0 when the queue has unfinished jobs.
local function forget_queue(queue)
  local row = find_row(queue)
  if not row then return 1 end
  if size_of(queue) > 0 then return 0 end
  for _, field in ipairs(call('HKEYS', row.key)) do
    if field ~= 'gated' and field ~= 'laned' then call('HDEL', row.key, field) end
  end
  call('ZREM', B .. ':queues', queue)
  rows[queue] = nil
  return 1
end

local ACTS = {cancel = cancel, retry = retry, delete = delete, alter = alter}

-- Return for each id '1', or '0' for a refusal. Ids begin at `first`.
-- A retry reads how many earlier jobs a job waits for. So it stops while ended jobs are not counted down yet. The
-- caller counts them down, and repeats the call with the remaining ids.
local function act_on_jobs(verb, first)
  local act, done, counts = ACTS[verb], {}, verb == 'retry'
  local force, due = string.match(ARGV[6], '^([012]) (%d+)$') -- 2: only scheduled jobs
  if counts then
    flows.resumed = call('LLEN', K_FLOW) > 0
    flow()
  end
  for i = first, #ARGV do
    if counts and flows_on() then break end
    local j = load_job(ARGV[i])
    local did = j and (force ~= '2' or j.state == SCHEDULED) and act(j, force == '1', tonumber(due))
    if did and counts and force ~= '2' then log(j, 'retry was asked for', now / 1000000) end
    done[#done + 1] = did and '1' or '0'
    flow() -- dependents of this job may end with it; the next acts must see their ends
  end
  return table.concat(done)
end

function Verbs.admin()
  local verb, reply = ARGV[5], 0
  local again = cached_reply() or ((verb ~= 'delete' or is_sealed()) and departure())
  if again then return again end
  if verb == 'queue' then
    set_queue(ARGV[6], ARGV[7], ARGV[8])
  elseif verb == 'forget' then
    reply = forget_queue(ARGV[6])
  else
    reply = act_on_jobs(verb, 7)
  end
  finish_step()
  return cache_reply({reply, flows_on() and 1 or 0})
end
