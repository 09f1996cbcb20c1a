-- Admin calls: act on jobs by their ids, and on queues.
--
-- ARGV  5 verb
--       cancel   6 'cancel' or 'terminate', then ids     kick   6 'force' or '', then ids     delete   6 '', then ids
--       alter    6 rank or '', a space, queue or '', then ids
--       queue    6 queue, 7 paused: '', '0', '1', 8 max_size: '' or a number
--       purge    6 queue, 7 number of entries to look at, at most, 8 place to go on from, see admin_purge.lua,
--                9 id of the purge, to keep the jobs     restore   6 id of the purge, then ids
--       forget   6 queue
--       recall   6 number of jobs at most
-- Returns {reply, 1 when `housekeeping` must go on, else 0}, or {'moved', where}. The reply is '0', '1' or '2' for each id;
--       queue 0; purge {number of jobs purged, place to go on from}; forget 1 or 0;
--       recall the number of jobs.

local function cancel(j)
  if j.state >= SUCCEEDED then return false end
  if j.state == RUNNING then
    if not flagged(j.flags, CANCELLING) then j.flags = j.flags + CANCELLING end
    save(j)
    log(j, ARGV[6] == 'terminate' and 'cancel was asked for, at once' or 'cancel was asked for', now / 1000000)
    call('RPUSH', B .. ':c:' .. j.owner, pack('>I8', j.token) .. ARGV[6])
    hint_owner(j.owner)
  else
    unplace(j)
    finish(j, CANCELLED, NOT_STARTED)
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

local WAITED = '; it waited for jobs' -- the end of the error of a purged job that waited for others

-- Cancel a job for a purge that keeps its jobs.
local function keep_purged(j, purge_id)
  if j.state >= RUNNING then return false end
  local waited = j.state == WAITING and wait_of(j.id)
  unplace(j)
  finish(j, CANCELLED, PURGED .. purge_id .. (waited and WAITED or ''))
  count(j.queue, 'cancelled', -1)
  return true
end

-- Restore a purged job to its former state.
local function restore(j)
  local mark = PURGED .. ARGV[6]
  if j.state ~= CANCELLED or j.error ~= mark and j.error ~= mark .. WAITED then return false end
  local wait = j.error ~= mark and wait_of(j.id)
  if wait and not may_wait_anew(wait) then return false end
  if j.key ~= '' then
    if Unique.find(j.key) then return false end -- at most one unfinished job per key
    Unique.put(j.key, j.id, nil, 0, 0)
  end
  unfinish(j)
  j.error, j.finished, j.prune = '', 0, 0
  if flagged(j.flags, LINKED) then add_end(j.id, REVIVED) end
  if j.expires > 0 then add_due(j.expires, 'x' .. j.id) end
  if wait then wait_anew(j, wait) else place(j, j.due) end
  return true
end

-- Purge the next jobs of a queue: {number of jobs, place to go on from}.
local function purge(queue, most, place, purge_id)
  local ids, next_place = to_purge(queue, most, place)
  local many = 0
  for _, id in ipairs(ids) do
    local j, done = load_job(id), false -- SCAN may name a job twice
    if j and purge_id then done = keep_purged(j, purge_id) elseif j then done = delete(j) end
    if done then many = many + 1 end
  end
  if many > 0 then count(queue, 'purged', many) end
  return {many, next_place}
end

local ACTS = {cancel = cancel, kick = kick, delete = delete, alter = alter, restore = restore}

-- Return for each id '1', or '0' for a refusal. Ids begin at `first`.
-- A kick and a restore read how many earlier jobs a job waits for. So they stop while ended jobs are not counted
-- down yet. The caller counts them down, and repeats the call with the remaining ids.
local function act_on_jobs(verb, first)
  local act, done, counts = ACTS[verb], {}, verb == 'restore' or verb == 'kick'
  if counts then
    flows.resumed = call('LLEN', K_FLOW) > 0
    flow()
  end
  for i = first, #ARGV do
    if counts and flows_on() then break end
    local j = load_job(ARGV[i])
    local did = j and act(j, ARGV[6] == 'force')
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
  elseif verb == 'purge' then
    reply = purge(ARGV[6], tonumber(ARGV[7]), ARGV[8], ARGV[9])
  elseif verb == 'forget' then
    reply = forget_queue(ARGV[6])
  else
    reply = act_on_jobs(verb, 7)
  end
  finish_step()
  return cache_reply({reply, flows_on() and 1 or 0})
end

-- For purges that keep their jobs: a server that is out of memory refuses this function.
Verbs.admin_kept = Verbs.admin
