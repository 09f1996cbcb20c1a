-- Accept jobs, all or none, in order.
--
-- ARGV  5 number of jobs, then four arguments for each (see put_accept.lua); then nothing more, or
--       n ids of jobs to hold, n ids of held jobs to let go
-- Returns 1 when all were created; else {placed, id, placed, id, …}. When nothing was stored: {'id', id},
--       {'key', id, key}, {'full', queue, max_size}, {'waits', id} (that job does not wait), {'moved', where}, or
--       'due' when `housekeeping` must move due jobs before the next call.

-- Try all puts before any job is stored. Return the reason to refuse a put, or nil.
local function refused(last)
  local ids, held, added = {}, {}, {}
  for i = 6, last, 4 do
    local id, record = ARGV[i], ARGV[i + 1]
    local queue, key = unpk('>Bc0Bc0', record, RECORD_RANK + 4)
    local holders, conflict = nil, Conflict.KEEP
    if key ~= '' then
      conflict = byte(ARGV[i + 3], 1)
      if not held[key] then
        local found = Unique.find(key) or {}
        held[key] = {over = found.over}
        for _, holder in ipairs({found.holder, found.successor}) do
          local j = load_job(holder)
          table.insert(held[key], {j.queue, j.state == RUNNING})
        end
      end
      holders = held[key]
      if (#holders > 0 or holders.over) and conflict == Conflict.REJECT then return {'key', id, key} end
    end
    if ids[id] or jobs[id] then return {'id', id} end
    if not holders or not holders.over and (#holders == 0 or conflict == Conflict.REPLACE) then
      local stays = holders and holders[1] and holders[1][2] and holders[1] or nil
      for n, holder in ipairs(holders or {}) do
        if holder ~= stays then added[holder[1]] = (added[holder[1]] or 0) - 1 end
      end
      local row = find_row(queue)
      if row and row.max_size > 0 and not (flagged(byte(record, 2), LINKED) and byte(ARGV[i + 3], LINKS_WAITS) > 0) then
        row.size = row.size or size_of(queue)
        if row.size + (added[queue] or 0) >= row.max_size then return {'full', queue, tostring(row.max_size)} end
      end
      added[queue] = (added[queue] or 0) + 1
      ids[id] = true
      if key ~= '' then held[key] = stays and {stays, {queue, false}} or {{queue, false}} end
    end
  end
  return nil
end

-- Return the reason to refuse a put with a link to a job that does not exist or no longer waits.
local function refused_links(last, let_go)
  local named, seen, coming = {}, {}, {}
  local function name(id)
    if not seen[id] then named[#named + 1] = id end
    seen[id] = true
  end
  for _, id in ipairs(let_go) do name(id) end
  for i = 6, last, 4 do
    if flagged(byte(ARGV[i + 1], 2), LINKED) then
      local links = parse_links(ARGV[i + 3])
      flows.links[ARGV[i]] = links
      for _, id in ipairs(links.next) do
        if not coming[id] then name(id) end
      end
      if links.waits > 0 then coming[ARGV[i]] = true end
    end
  end
  read_waits_ahead(named)
  read_ahead(named)
  for _, id in ipairs(named) do
    local j = wait_of(id) and load_job(id)
    if not j or j.state ~= WAITING then return {'waits', id} end
  end
  return nil
end

-- Read the set of ids to hold and the list of ids to let go; also whether the call has any arguments about links.
local function read_links_wish(last)
  local on_hold, let_go = {}, {}
  if not ARGV[last + 1] then return on_hold, let_go, false end
  local holds = tonumber(ARGV[last + 1])
  for i = last + 2, last + 1 + holds do on_hold[ARGV[i]] = true end
  for i = last + 3 + holds, #ARGV do let_go[#let_go + 1] = ARGV[i] end
  return on_hold, let_go, true
end

-- Move due jobs first, since no put may be refused because of an expired job. True when `housekeeping` must
-- go on.
local function move_due_first()
  local first = call('ZRANGE', K_DUE, 0, 0, 'WITHSCORES')
  if not first[1] or tonumber(first[2]) > now then return false end
  if come_due() then
    finish_step()
    return true
  end
  flush()
  return false
end

-- Store all jobs: for each the outcome, and the id of the job that stands for it; or 1 when all were created.
local function store_all(last)
  local puts, plain = {}, true
  for i = 6, last, 4 do
    local placed, id = put_one(ARGV[i], ARGV[i + 1], ARGV[i + 2], ARGV[i + 3])
    puts[#puts + 1] = placed
    puts[#puts + 1] = id
    plain = plain and placed == Placed.CREATED
  end
  return plain and 1 or puts
end

function Verbs.put()
  local again = cached_reply() or departure()
  if again then return again end
  local many = tonumber(ARGV[5])
  local last = 5 + many * 4
  local on_hold, let_go, linked = read_links_wish(last)
  if move_due_first() then return 'due' end
  local ids = {}
  for i = 6, last, 4 do ids[#ids + 1] = ARGV[i] end
  read_ahead(ids)
  local why = refused(last) or linked and refused_links(last, let_go)
  if why then
    finish_step() -- write the jobs that came due
    return why
  end
  seq = call('INCRBY', B .. ':seq', many) - many
  local puts = store_all(last)
  if linked then
    for _, id in ipairs(let_go) do count_down(id, false, '') end
    begin_all(6, many, on_hold)
  end
  finish_step()
  return cache_reply(puts)
end
