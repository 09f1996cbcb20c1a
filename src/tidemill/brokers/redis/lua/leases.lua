-- Give back the leases of an owner that is gone, and remove the owner.

local function died(outcome, why)
  return {outcome = outcome, delay = 0, started = 0, ended = now / 1000000, error = why, traceback = '', result = ''}
end

-- All leases of an owner, as (token, id), by token.
local function leases_of(owner)
  local all, leases = call('HGETALL', B .. ':l:' .. owner), {}
  for i = 1, #all, 2 do leases[#leases + 1] = {tonumber(all[i]), all[i + 1]} end
  table.sort(leases, function(a, b) return a[1] < b[1] end)
  return leases
end

local release_leases

do

-- Give back a lease whose owner vanished: a message gets a failed attempt, a task gets a loss. A task fails
-- after as many losses as it may have attempts.
local function lose(j, worker)
  if flagged(j.flags, MESSAGE) then return close_attempt(j, worker, died(Outcome.RETRY, 'its consumer died')) end
  j.losses = j.losses + 1
  log(j, string.format('lost after %.3f s with its worker %s', (now - j.leased) / 1000000, worker), now / 1000000)
  if j.limit > 0 and j.losses >= j.limit then
    end_lease(j)
    finish(j, FAILED, 'lost with its worker: loss ' .. j.losses .. ' of ' .. j.limit)
  else
    local v = died(Outcome.RELEASE, '')
    v.started = now / 1000000 -- the task may have run
    close_attempt(j, worker, v)
  end
end

-- Give back all leases of an owner; `cause(token)` says how a run died, or nil for a job that did not run.
function release_leases(owner, worker, lost, cause)
  local leases = leases_of(owner)
  for _, lease in ipairs(leases) do
    local j = load_job(lease[2])
    local why = cause(lease[1])
    if not j or j.token ~= lease[1] then
      drop_token(owner, lease[1])
    elseif lost then
      lose(j, worker)
    elseif why then
      close_attempt(j, worker, died(Outcome.RETRY, why))
    else
      close_attempt(j, worker, died(Outcome.RELEASE, NOT_STARTED))
    end
  end
  return #leases
end

end

-- Note that the list of owners has changed: each owner hears of the change with its next step.
local function note_owners_changed()
  local number = call('INCR', B .. ':seq')
  for _, id in ipairs(call('ZRANGE', B .. ':beat', 0, -1)) do call('HSET', B .. ':o:' .. id, 'roster', number) end
end

-- Take an owner off the list, and delete its keys.
local function remove_owner(owner)
  call('DEL', B .. ':o:' .. owner, B .. ':c:' .. owner, B .. ':l:' .. owner)
  call('ZREM', B .. ':beat', owner)
  HandOff.terms[B .. ':o:' .. owner] = nil
  call('ZREM', B .. ':fires', owner)
  note_owners_changed()
  call('ZREM', K_ASLEEP, owner)
end
