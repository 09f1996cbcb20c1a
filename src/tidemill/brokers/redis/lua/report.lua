-- The report of an owner about its leases: notes, verdicts, touches, and rows of history.

local linked_of, apply_report, apply_changes

do

-- Those of some jobs that come before or after others. The jobs must be read already.
function linked_of(ids)
  local linked = {}
  for _, id in ipairs(ids) do
    local data = jobs[id]
    if type(data) == 'string' and byte(data, 10) >= LINKED and flagged(byte(data, 10), LINKED) then
      linked[#linked + 1] = id
    end
  end
  return linked
end

-- Read the jobs of all leases in the report.
local function read_held(x)
  local tokens, texts, ids, held = x.tokens, {}, {}, x.held
  for i, token in ipairs(tokens) do texts[i] = known_text(token) end
  for i, id in ipairs(fetch_all(x.leases_key, texts)) do
    if id and tokens[i] ~= x.unheard then
      held[tokens[i]] = id
      ids[#ids + 1] = id
    end
  end
  read_ahead(ids)
  read_links_ahead(linked_of(ids))
  Partitions.read_ahead(ids)
end

-- The job of a lease, or nil when the owner does not have that lease.
local function job_held(x, token)
  local j = x.held[token] and load_job(x.held[token])
  return j and j.state == RUNNING and j.token == token and j.owner == x.owner and j or nil
end

local function note(x, token, done, total, time, line, text)
  local j = job_held(x, token)
  if not j then return end
  if done >= 0 then call('SET', B .. ':p:' .. j.id, pack('>dd', done, total) .. text) end
  log(j, line, time)
end

-- Extend the lease of a message.
local function touch(x, token, seconds)
  local j = job_held(x, token)
  if not j then return '0' end
  if j.deadline > 0 then
    local ttr = seconds > 0 and seconds or (j.ttr > 0 and j.ttr or 60)
    j.deadline = now + math.floor(ttr * 1000000)
    add_due(j.deadline, 'l' .. j.id)
    save(j)
  end
  return '1'
end

-- Settle a lease that `succeed_plainly` has not settled: '1', or '0' when the owner does not have the lease.
local function settle_in_full(x, v)
  local j = job_held(x, v.token)
  if not j then return '0' end
  close_attempt(j, x.worker, v)
  follow(v.first, v.followers)
  return '1'
end

local function settle_all(x)
  local held, settled, owner, worker = x.held, x.settled, x.owner, x.worker
  for i, v in ipairs(x.verdicts) do
    local id = held[v.token]
    local data = id and jobs[id]
    if type(data) == 'string' and succeed_plainly(id, data, owner, worker, v) then
      settled[i] = '1'
    else
      settled[i] = settle_in_full(x, v)
    end
  end
end

-- Note, settle, touch and count, in that order.
function apply_report(x)
  read_held(x)
  for _, n in ipairs(x.notes) do note(x, unpack(n)) end
  settle_all(x)
  for i, t in ipairs(x.touches) do x.touched[i] = touch(x, t[1], t[2]) end
  call_all('RPUSH', B .. ':counts', x.history)
end

-- Count down the dependents of ended jobs and write all changes. The claim may lease settled jobs again, and
-- their dependents.
function apply_changes()
  flow()
  Limits.sync()
  flush()
end

end
